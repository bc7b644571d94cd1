"""
Every benchmark that needs no GPU, one after the other, each in a process of its own.

    python benchmarks/run_all.py
"""

import subprocess
import sys
import time
from pathlib import Path


SCRIPTS = ("loss.py", "cache_layouts.py", "data_loading.py", "capture.py", "step.py", "end_to_end.py")


def main() -> int:
    failed = []
    for name in SCRIPTS:
        print(f"\n{name}", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, str(Path(__file__).with_name(name))], check=False).returncode
        print(f"{name}: exit {code} after {time.monotonic() - start:.0f} s", flush=True)
        if code:
            failed.append(name)
    if failed:
        print("\nfailed, or missed a bar:", ", ".join(failed))
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())

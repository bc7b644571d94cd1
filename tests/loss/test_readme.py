import re
from pathlib import Path

import trl_offline_distill.loss


def test_the_formulas_hold():
    text = (Path(trl_offline_distill.loss.__file__).parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert sum(block.count("assert") for block in blocks) >= 4
    exec("\n".join(blocks), {})

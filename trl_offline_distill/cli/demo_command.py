"""`trl-offline-distill demo`."""


def run(argv: list[str]) -> int:
    from ..demo import DemoArguments, run_demo
    from .arguments import expand, help_text, make_parser, parse

    parser = make_parser([DemoArguments], "demo", "Cache a small teacher once, heal a student that lost half of it.")
    if {"-h", "--help"} & set(argv):
        print(help_text(parser, {}, rest="options"))
        return 0
    args, _ = parse(parser, expand(argv, "demo.yaml"))

    import warnings

    from transformers.utils import logging

    # The demo shows bars of its own, and TRL's default checkpointing option is deprecated in transformers.
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    run_demo(args)
    if args.only_material:
        print("Next: trl-offline-distill drop-layers --recipe smollm2_healing")
    return 0

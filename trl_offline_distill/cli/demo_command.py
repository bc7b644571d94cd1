"""`trl-offline-distill demo`."""


def run(argv: list[str]) -> int:
    from ..demo import DemoArguments, run_demo
    from .arguments import expand, make_parser, parse

    parser = make_parser([DemoArguments], "demo", "Cache a small teacher once, heal a student that lost half of it.")
    args, _ = parse(parser, expand(argv, "demo.yaml"))
    run_demo(args)
    return 0

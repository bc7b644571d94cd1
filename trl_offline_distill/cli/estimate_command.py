"""`trl-offline-distill estimate`."""


def run(argv: list[str]) -> int:
    from ..estimate import EstimateArguments, format_estimate
    from .arguments import expand, help_text, make_parser, parse
    from .inspect_command import first_positional

    parser = make_parser(
        [EstimateArguments],
        "estimate",
        "Memory, longest row, cache size and time of a run, from a model's configuration alone.",
    )
    if {"-h", "--help"} & set(argv):
        print(help_text(parser, {}, rest="options"))
        return 0
    args, _ = parse(parser, expand(first_positional(argv, "model_name_or_path"), "estimate.yaml"))
    print(format_estimate(args))
    return 0

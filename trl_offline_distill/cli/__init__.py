"""Command line: `trl-offline-distill COMMAND`."""

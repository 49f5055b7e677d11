"""How `--help` shows options and the text below them."""

import argparse


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows defaults that say something, as one types them; keeps line breaks below the options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        silent = default is None or default is False or default in ([], argparse.SUPPRESS)
        if action.help is None or action.required or silent:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {shown.replace('%', '%%')})"

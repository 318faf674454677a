"""The help of a command: its options in panels, with whole names at any width.

Typer's own page gives each option four columns and cuts long names in 80 characters.
"""

from __future__ import annotations

from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from your_ai.gates.console import open_console

NAMES_WIDTH = 0.4  # maximum share of the width for the names of options


class CommandWithPanels(TyperCommand):
    """A command whose help has a panel for each `rich_help_panel` of its parameters."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; `formatter`, which would collect it as plain text, gets nothing."""
        console = open_console()
        usage = " ".join(self.collect_usage_pieces(ctx))
        console.print(Text.assemble("\nUsage: ", (f"{ctx.command_path} {usage}", "bold"), "\n"))
        console.print(Text(" ".join((self.help or "").split()) + "\n"))
        for title, parameters in self.panels(ctx).items():
            table = Table.grid(padding=(0, 2, 0, 0))
            names_width = max(12, int(NAMES_WIDTH * console.width))
            table.add_column(style="cyan", overflow="fold", max_width=names_width)
            table.add_column(overflow="fold")
            for names, text in parameters:
                table.add_row(Text(names), Text(text))
            console.print(Panel(table, title=Text(title), title_align="left", border_style="dim"))

    def panels(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """(names, help) of each parameter, by the title of its panel."""
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:  # it is hidden
                continue
            is_argument = parameter.param_type_name == "argument"
            own = getattr(parameter, "rich_help_panel", None)
            title = own or ("Arguments" if is_argument else "Options")
            found.setdefault(title, []).append(record)
        return found

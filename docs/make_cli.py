"""Write docs/cli.md from the commands themselves:  python docs/make_cli.py > docs/cli.md"""

from __future__ import annotations

import typer.main

from your_ai.cli import app


def document() -> str:
    parts = [
        "# Commands",
        "",
        "Made by `python docs/make_cli.py > docs/cli.md`. Every option of `train` is also the key",
        "of a YAML file, with underscores: `--batch-size 8` is `batch_size: 8`.",
    ]
    for name, command in typer.main.get_command(app).commands.items():
        parts += ["", f"## your_ai {name}", "", (command.help or "").strip(), ""]
        parts += ["| option | meaning |", "|---|---|"]
        for parameter in command.params:
            names = "/".join([*parameter.opts, *parameter.secondary_opts])
            if names == "--help":
                continue
            metavar = f" {parameter.metavar}" if parameter.metavar else ""
            option = f"{names}{metavar}".replace("|", "\\|")
            parts.append(f"| `{option}` | {parameter.help} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(document(), end="")

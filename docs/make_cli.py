"""Write docs/cli.md from the commands themselves:  python docs/make_cli.py > docs/cli.md"""

from __future__ import annotations

from typing import Any

from your_ai.cli import parser


def document() -> str:
    parts = [
        "# Commands",
        "",
        "Made by `python docs/make_cli.py > docs/cli.md`. Every option of `train` is also the key",
        "of a YAML file, with underscores: `--batch-size 8` is `batch_size: 8`. Only `--from` has",
        "another key, `from_adapter`.",
    ]
    for name, command in parser().commands.items():
        parts += section(name, command)
        for inner, subcommand in getattr(command, "commands", {}).items():
            parts += section(f"{name} {inner}", subcommand)
    return "\n".join(parts) + "\n"


def section(name: str, command: Any) -> list[str]:
    parts = ["", f"## your_ai {name}", "", (command.help or "").strip(), ""]
    parts += ["| option | meaning |", "|---|---|"]
    for parameter in command.params:
        names = "/".join([*parameter.opts, *parameter.secondary_opts])
        if names == "--help":
            continue
        if parameter.param_type_name == "argument":
            option = parameter.metavar or parameter.name.upper()
        else:
            option = f"{names} {parameter.metavar or ''}".rstrip()
        option = option.replace("|", "\\|")
        parts.append(f"| `{option}` | {parameter.help} |")
    return parts


if __name__ == "__main__":
    print(document(), end="")

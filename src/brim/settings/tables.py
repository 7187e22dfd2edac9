"""The tables of settings in the docs, written from the declarations."""

from __future__ import annotations

from typing import Any

from brim.settings.commands import COMMANDS, Command
from brim.settings.declare import Declared, declared
from brim.settings.train_settings import SETTING_KEYS

__all__ = ["KEYS_BEGIN", "KEYS_END", "settings_page", "with_keys"]

KEYS_BEGIN = "<!-- keys: written by python -m brim.settings.generated -->"
KEYS_END = "<!-- end of keys -->"
_INTRODUCTION = """# Settings

Written by `python -m brim.settings.generated` from the declarations in `src/brim/settings`; a test keeps it current.

Every setting has one name. On the command line it is a flag (`--batch-size 8`, or `--batch_size 8`), in Python a
parameter (`brim.find(…, batch_size=8)`), in a file that `--settings FILE` names a key:

```yaml
# brim eval --settings eval.yaml -b 16      (a flag comes before the file)
model: ./my-model
data: questions.jsonl
batch_size: 8           # or batch-size
metrics: [bleu, rouge]
knob: {max_crops: 4}
```

An error names what was written: `--batch-size 0: …`, `batch_size=0: …`, or `eval.yaml: batch_size (line 4): 0: …`.
"""


def settings_page() -> str:
    """The page with every command's settings."""
    return "\n".join([_INTRODUCTION, *(_command(command) for command in COMMANDS.values())])


def with_keys(page: str) -> str:
    """A page with the table of a training file's keys between its two marks."""
    before, mark, rest = page.partition(KEYS_BEGIN)
    _, end, after = rest.partition(KEYS_END)
    assert mark
    assert end
    rows = [
        f"| `{row.key}` | {row.takes} | {_value(row.default)} | {_cell(row.help)} |" for row in SETTING_KEYS.values()
    ]
    table = "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows])
    return f"{before}{KEYS_BEGIN}\n\n{table}\n\n{KEYS_END}{after}"


def _command(command: Command) -> str:
    call = "" if command.python is None else f", `brim.{command.python.name}()`"
    rows = [_row(one) for one in declared(command.declaration()) if not one.setting.hidden]
    table = ["| flag | parameter | default | meaning |", "|---|---|---|---|", *rows] if rows else ["No settings."]
    return "\n".join([f"## `brim {command.name}`{call}", "", command.summary, "", *table, ""])


def _row(one: Declared) -> str:
    setting = one.setting
    flags = [*([setting.metavar.split()[0] if setting.metavar else one.name] if setting.argument else []), *one.flags]
    shown = "" if setting.only == "python" else " ".join(f"`{flag}`" for flag in flags)
    parameter = "" if setting.only == "flags" else f"`{one.name}`"
    default = "required" if one.required else _value(one.default)
    return f"| {shown} | {parameter} | {default} | {_cell(setting.help)} |"


def _value(default: Any) -> str:
    if default is None or default is False:
        return "" if default is None else "`false`"
    if default is True:
        return "`true`"
    return f"`{','.join(map(str, default)) if isinstance(default, tuple) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

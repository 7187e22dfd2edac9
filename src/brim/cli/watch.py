"""`brim watch`: the GPUs and the runs of this machine, on the whole screen or printed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.cli.console import output_console, print_document
from brim.cli.watch_screen import draw_frame, show_screen, write_forever
from brim.monitor.snapshot import Observer

if TYPE_CHECKING:
    from brim.settings.watch_settings import WatchSettings

__all__ = ["watch"]


def watch(settings: WatchSettings) -> None:
    """Show until q or Ctrl-C; once where that is asked for, or where the output is no terminal."""
    console = output_console()
    if settings.json_output or settings.once or not (console.is_terminal or settings.metrics):
        from brim.monitor.snapshot import take_snapshot

        document = take_snapshot(settings).document
        if settings.json_output:
            print_document(document)
        else:
            console.print(draw_frame(document, width=console.width))
        return
    with Observer(settings.run) as observer:
        if console.is_terminal:
            show_screen(console, observer, settings)
        else:  # a service that writes the metrics
            write_forever(observer, settings)

"""Vega, Vega-Lite and Vega-Embed as one script for a page, taken from vl-convert, which carries them: no download.

Putting the script together takes vl-convert two seconds, so it is kept in the cache folder, by version.
"""

from __future__ import annotations

import contextlib
import functools
from importlib import metadata

from brim.errors import RequestError
from brim.storage.files import cache_folder, write_atomic

__all__ = ["chart_library"]


@functools.cache
def chart_library(schema_version: str) -> str:
    """The script for the Vega-Lite that Altair writes (`v6.4.1`); it gives the page `vegaEmbed` and nothing else."""
    release = ".".join(schema_version.removeprefix("v").split(".")[:2])
    carrier = metadata.version("vl-convert-python")
    kept = cache_folder() / "report" / f"vega-lite-{release}-vl-convert-{carrier}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except OSError:
        script = _bundle(release, carrier)
    with contextlib.suppress(RequestError):  # a cache that cannot be written costs the next page two seconds, no more
        write_atomic(kept, script)
    return script


def _bundle(release: str, carrier: str) -> str:
    import vl_convert

    try:
        code = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", release)
    except ValueError as error:
        raise RequestError(
            f"vl-convert-python {carrier} does not carry Vega-Lite {release}, which altair writes; "
            f"install versions that go together: pip install --upgrade 'altair[save]'"
        ) from error
    # The bundle declares hundreds of short names: inside a function they stay its own. No tag may end the script.
    return "(() => {" + code.replace("</script", "<\\/script").replace("<!--", "<\\!--") + "\n})();"

"""`python -m brim`, which is also how torchrun starts it."""

from brim.cli.main import run

run()

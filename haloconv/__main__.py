"""``python -m haloconv``: the command line."""

from haloconv.cli import app

app(prog_name="haloconv")

"""How Sphinx builds the site from these pages: `make docs`."""

import importlib.metadata
import os
import re
from pathlib import Path

# Tutorials are run when the site is built, on devices that the CPU stands in for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "lioncub_jax"
author = "The lioncub_jax authors"
release = importlib.metadata.version("lioncub_jax")
html_title = f"lioncub_jax {release}"
html_theme = "sphinx_book_theme"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "navbar_persistent": [],  # the search is in the column on the left
    "use_download_button": False,
    "use_fullscreen_button": False,
}

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3  # as GitHub gives them, so that a link works on both
nb_execution_mode = "force"
nb_execution_timeout = 600  # seconds for a cell; the longest takes half a minute of two free cores
nb_execution_raise_on_error = True

# A name between single backticks is a link where the site has the name, and code elsewhere.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have shapes, which say more
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:[A-Z]+\.md|examples)[^)]*)\)")


def name_what_is_outside(app, docname, source):
    """Of pages and folders outside docs/ the site has the names; GitHub has links to them."""

    def told(link):
        path = Path(app.srcdir, docname).parent / link[2].partition("#")[0]
        return link[1] if path.is_dir() or path.suffix == ".md" else link[0]

    source[0] = OUTSIDE.sub(told, source[0])


def leave_out_fields(app, what, name, obj, skip, options):
    """The fields of a NamedTuple: the docstring of the class tells of them."""
    return True if type(obj).__name__ == "_tuplegetter" else skip


def setup(app):
    app.connect("source-read", name_what_is_outside)
    app.connect("autodoc-skip-member", leave_out_fields)

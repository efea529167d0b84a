"""How Sphinx builds the site from these pages: `make docs`."""

import ast
import importlib.metadata
import inspect
import os
import re
import shutil
import textwrap
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
    "use_download_button": False,  # only a notebook has one, below
    "use_fullscreen_button": False,
}

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3  # as GitHub gives them, so that a link works on both
nb_execution_mode = "force"
nb_execution_timeout = 600  # seconds for a cell; the longest takes half a minute of two free cores
nb_execution_raise_on_error = True

# A name between single backticks is a link where the site has the name, and code elsewhere.
default_role = "py:obj"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 70  # a longer one has a line for each argument
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Pages of the site that show a file of the repository.
SHOWN = {f"{page}.md": f"{page.lower()}.md" for page in ("CHANGELOG", "CONTRIBUTING")}
SHOWN["README.md"] = "index.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


PLAN = re.compile(r"(?<=<!-- plan -->\n)(```console\n.*?\n)(.*?)(?=\n```)", re.S)


def on_the_site(text, folder, page):
    """Links of a file in ``folder`` as those of ``page``; a name alone where the site has no such page.

    What a plan prints has one line for each paragraph, which wraps at the reader's window.
    """

    def link(found):
        label, path, anchor = found.groups(default="")
        target = (folder / path).resolve()
        if target.parent == ROOT and target.name in SHOWN:
            target = DOCS / SHOWN[target.name]
        if not target.exists():  # code in brackets
            return found[0]
        if DOCS not in target.parents and (target.is_dir() or target.suffix in (".md", ".ipynb")):
            return label
        return f"[{label}]({os.path.relpath(target, page.parent)}{anchor})"

    joined = PLAN.sub(lambda found: found[1] + re.sub(r"(?<=\S)\n(?=\S)", " ", found[2]), text)
    return LINK.sub(link, joined)


def read_page(app, docname, source):
    page = DOCS / docname
    source[0] = on_the_site(source[0], page.parent, page)


def read_included(app, path, docname, source):
    """Files of the repository are included by pages at the root of docs."""
    source[0] = on_the_site(source[0], (DOCS / path).resolve().parent, DOCS / docname)


def signature_as_written(app, what, name, thing, options, signature, returned):
    """Types have the names of the source: an alias is not spelled out."""
    if not inspect.isroutine(thing):
        return signature, returned
    function = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    if what == "method":
        del function.args.args[0]
    return f"({ast.unparse(function.args)})", function.returns and ast.unparse(function.returns)


def leave_out_fields(app, what, name, obj, skip, options):
    """The fields of a NamedTuple: the docstring of the class tells of them."""
    return True if type(obj).__name__ == "_tuplegetter" else skip


def offer_notebook(app, page, template, context, doctree):
    """A button with what was run, on the pages that are notebooks."""
    notebook = Path(app.outdir).parent / "jupyter_execute" / f"{page}.ipynb"
    if notebook.exists():
        shutil.copyfile(notebook, Path(app.outdir, f"{page}.ipynb"))
        context["header_buttons"].append(
            {
                "type": "link",
                "url": f"{notebook.name}",
                "text": ".ipynb",
                "icon": "fas fa-download",
                "tooltip": "Download this page as a notebook",
                "label": "download-notebook-button",
            }
        )


def setup(app):
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("autodoc-process-signature", signature_as_written)
    app.connect("autodoc-skip-member", leave_out_fields)
    app.connect("html-page-context", offer_notebook, priority=900)

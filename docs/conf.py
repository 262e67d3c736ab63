"""The site of docs/: Sphinx reads these pages by MyST, API pages from docstrings; `make docs` builds it to out/site."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "sbpflow"
extensions = ["myst_parser", "sphinx.ext.autodoc", "tools.api_pages"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4  # links to headings are those of the forge: pipelines.md#two-towers
myst_linkify_fuzzy_links = False

default_role = "literal"
highlight_language = "none"
add_module_names = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch's are in its own markup

html_theme = "furo"
html_title = "sbpflow"
html_favicon = "pictures/favicon.svg"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}

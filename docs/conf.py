"""How sphinx builds these pages."""

import donorloader

project = "donorloader"
author = "donorloader developers"
copyright = "donorloader developers"
release = version = donorloader.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"donorloader {release}"
html_static_path = ["_static"]

myst_heading_anchors = 3
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
maximum_signature_line_length = 90
python_use_unqualified_type_names = True

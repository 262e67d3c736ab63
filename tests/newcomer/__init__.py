"""Ten tasks of a newcomer, each done by copying from one page, where the package was installed from its wheel."""

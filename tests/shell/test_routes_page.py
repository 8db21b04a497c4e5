"""docs/routes.md says what the table of routes says."""

from routes_page import PAGE, page


def test_the_page_is_made_of_the_table() -> None:
    """Make it anew and compare: `python tests/routes_page.py > docs/routes.md` mends a difference."""
    assert PAGE.read_text() == page()

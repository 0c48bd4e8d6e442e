"""``pytest tests/golden --update-golden`` writes the texts anew; review them as a diff."""


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write golden texts instead of comparing"
    )

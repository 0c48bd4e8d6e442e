"""Result files: few, each named by a page or a docstring, and the index is theirs."""

from experiments import results_index


def test_the_index_is_of_the_files():
    """``python -m experiments.results_index`` writes it."""
    assert (results_index.RESULTS / "README.md").read_text() == results_index.index()


def test_every_file_is_named_somewhere():
    assert not results_index.unnamed()

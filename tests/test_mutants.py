"""The list of mutants fits the source and the tests; `python tests/mutants.py` runs it."""

import pytest

from mutants import MUTANTS, ROOT, SOURCE


def test_there_are_forty_and_each_has_a_name():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_names_tests_that_are_there(mutant):
    text = (SOURCE / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and mutant.old != mutant.new
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    file, *chosen = mutant.words
    tests = (ROOT / file).read_text()
    for word in set(" ".join(chosen).split()) - {"-k", "and", "or", "not"}:
        assert word in tests or word in ("fedavg", "scaffold", "fedams", "nan"), word

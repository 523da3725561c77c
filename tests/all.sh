#!/bin/sh
# tests/all.sh PYTHON: all tests in three processes, on two cores, since federations mostly wait. A group of tests (a
# file, or a page of the documentation: conftest.py) is one process's, and the longest groups are begun first.
#
# Tests that fail are run once more, one after the other, and that decides: many start real processes (federations,
# ranks, runs that are killed), which on a busy machine now and then miss a deadline. A wrong program fails twice. More
# than a few failures are no accident, nor is a file that cannot be collected or any other end than failed tests.
FEW=8
# Bytecode is kept aside, also where Python is told to write none: tests start some hundred processes.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$PWD/.pytest_cache/bytecode}"
LAST=.pytest_cache/v/cache/lastfailed  # a line for each
"$1" -m pytest -n 3 --dist loadscope --no-loadscope-reorder --cache-clear --durations 25
code=$?
if [ "$code" -eq 0 ]; then exit; fi
tests=$(grep -c '::.*": true' $LAST)
files=$(grep '": true' $LAST | grep -vc ::)
if [ "$code" -ne 1 ] || [ "$files" -gt 0 ] || [ "$tests" -gt $FEW ]; then exit "$code"; fi
echo "$tests OF THE TESTS FAILED: THEY ARE RUN ONCE MORE, ALONE, AND WHAT COMES OF THAT COUNTS"
"$1" -m pytest -n 0 -vv --last-failed --last-failed-no-failures none
code=$?
if [ "$code" -eq 0 ]; then echo "PASSED AT THE SECOND ATTEMPT ONLY, $tests OF THE TESTS: see above which"; fi
exit "$code"

"Random boards that several test files draw."
from hypothesis import strategies as st

from lake_engineer.lake import Lake, free_cells


@st.composite
def arrangements(draw, largest=6):
    "A lake with at least two free cells, starts and goals of one to five agents."
    n = draw(st.integers(2, largest))
    lake = Lake(n, draw(st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=n * n - 2)))
    free = free_cells(lake)
    k = draw(st.integers(1, min(5, len(free))))
    return lake, draw(st.permutations(free))[:k], draw(st.permutations(free))[:k]

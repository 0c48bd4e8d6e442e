"""Products whose rows have the same bits however many there are, for any number of rows.

A tensor core adds to a sum 16 products at a time, in their order along K. So two kernels that do
not cut K agree to the last bit, whichever tiles they have: the skinny kernel of
``few_rows_matmul`` for up to 256 rows, and the grouped product with one group for more.
"""

from .api import ordered_matmul as ordered_matmul

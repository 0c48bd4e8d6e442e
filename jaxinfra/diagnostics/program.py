"""Reading programs is done a floor lower, where planning can reach it too."""

from jaxinfra.parallel.program import Collective as Collective
from jaxinfra.parallel.program import Matmul as Matmul
from jaxinfra.parallel.program import Reduction as Reduction
from jaxinfra.parallel.program import collectives as collectives
from jaxinfra.parallel.program import compiled_matmuls as compiled_matmuls
from jaxinfra.parallel.program import matmuls as matmuls
from jaxinfra.parallel.program import opaque_operations as opaque_operations
from jaxinfra.parallel.program import reductions as reductions

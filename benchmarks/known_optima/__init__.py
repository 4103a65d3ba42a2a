"""Small sharding problems with known optima, for tests and benchmarks alike.

:mod:`.problems` makes them, :mod:`.exhaustive` enumerates the best placement under a cost model, :mod:`.cp_sat` proves
it where costs add up. Both cut tables as :mod:`.reference` says, so that two independent methods can be compared.
"""

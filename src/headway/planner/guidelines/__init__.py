"""Rules of the literature in closed form, and advice by them: devices, servers, groups, algorithms.

`zou` and `layer_parallelism` hold the formulas of the papers.
`advice` answers from given facts, `plan_advice` finds those facts in a model's graph and a cluster,
`layer_algorithms` chooses algorithms and minibatch under a bound on work space."""

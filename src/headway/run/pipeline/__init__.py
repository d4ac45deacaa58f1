"""Pipeline parallelism at run time: cutting the model, and one step by the schedule.

Enters: the whole model and a plan with the axis "pipe". Leaves: summed gradients of this rank's
stages. The messages and the execution of single actions are in `headway.parallel`."""

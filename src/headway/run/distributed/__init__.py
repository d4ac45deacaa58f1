"""The processes of a job: where they are, how they meet, and what happens when one dies.

In the order of a job: `launch_env` reads the variables of the launcher, `rendezvous` opens the
store, `world` makes the process groups, `heartbeat` and its watchdog notice a lost rank, and
`failure_record` writes down what the launcher needs to decide on a restart."""

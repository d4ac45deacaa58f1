"""The mutation suite: one-line bugs that `headway verify` must find; see README.md."""

"""The cost model of gradient exchange: from link fits and bucket sizes to step times."""

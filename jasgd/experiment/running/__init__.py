"""Training runs: in virtual time, on devices, in processes of many hosts.

==============  ==============================================================
file            content
==============  ==============================================================
`train`         `train_and_evaluate` from a config, and `jasgd.train`
`result`        `Result`, and its file
`virtual`       runs in this process: virtual time, checkpoints, metrics
`devices`       nodes on the devices of this process
`recipe`        all that the processes of a run must agree on
`local`         the life cycle of a run in processes or threads
`supervisor`    starts, watches, restarts and ends the processes of a run
`views`         what a supervisor sees of a server, or of nodes
`measuring`     metrics of replays and of real nodes
`children`      the functions that child processes call
`closures`      sends functions to child processes
`cluster`       one process of a run on many hosts
`signals`       Ctrl-C and SIGTERM
==============  ==============================================================
"""

"""Cases put to backends in worker processes: a crash or a hang costs one case its answer and one worker its life.

`session.open_session` opens either kind of session. The parent imports no kernel library and touches no device;
`pool` hands out cases and collects verdicts, `worker` is what runs in the other process.
"""

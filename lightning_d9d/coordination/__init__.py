"""Agreement between ranks while they run, without Lightning.

`watchdog.py`: signals, failing ranks and ranks that hang, through the job's store; `messages.py`: the values that ranks
write there. `common_point.py`: the point where all ranks end a fit, or validate after a time. `ahead.py`: messages
between data ranks about the next batch.
"""

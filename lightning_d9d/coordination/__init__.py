"""How ranks agree while they run, without Lightning.

`watchdog.py`: signals, failing ranks and ranks that hang, through the job's store; `messages.py`: what ranks write
there. `early_stop.py`: where all ranks end a fit. `ahead.py`: what data ranks send each other about the next batch.
"""

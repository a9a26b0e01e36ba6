"An LLM that redesigns its own training environment between rounds of reinforcement learning."

__version__ = "0.1.0"

from lake_engineer.registration import register_when_imported
register_when_imported()

"An LLM that redesigns its own training environment between rounds of reinforcement learning."

__version__ = "0.1.0"

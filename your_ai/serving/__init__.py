"""Serves to other programs: a run behind the OpenAI API, a live page, and training for agents."""

"""`python -m your_ai.training RUN`: the training process of a run."""

from your_ai.gates.programs import claim_process, quick_imports

claim_process()
with quick_imports():
    from your_ai.training.process import main

main()

from your_ai.cli import main

main()

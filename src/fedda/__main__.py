from fedda.cli import main

main()

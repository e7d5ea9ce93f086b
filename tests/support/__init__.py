"""What tests of several files share: doubles, runs, arrays to draw, ranks to start, references to compare with."""

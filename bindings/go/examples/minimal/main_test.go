// The example of the README is this program, and it prints what it says.

package main

import (
	"os"
	"strings"
	"testing"
)

func TestTheReadmeHoldsThisProgram(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	_, block, found := strings.Cut(string(readme), "```go\n")
	block, _, closed := strings.Cut(block, "```\n")
	_, code, _ := strings.Cut(string(program), "package main\n")
	if !found || !closed || block != "package main\n"+code {
		t.Errorf("the first example of README.md is not main.go but\n%s", block)
	}
}

// All keys are equal, so the output is the mean of the values, 1 to 100.
func Example() {
	main()
	// Output: the mean of 1 to 100 is 50.5
}

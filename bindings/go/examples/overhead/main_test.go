// A small workload is measured; the time is one that a step can take.

package main

import "testing"

func TestMeasure(t *testing.T) {
	small := workload{layers: 2, sequences: 3, prompt: 20, stepTokens: 24, warmUp: 1, timed: 4,
		arenaBytes: 4 << 20}
	median, err := small.measure()
	if err != nil || median <= 0 || median > 10e6 {
		t.Errorf("%v microseconds, %v", median, err)
	}
	small.arenaBytes = 1
	if _, err := small.measure(); err == nil {
		t.Error("a pool without an arena is measured")
	}
}

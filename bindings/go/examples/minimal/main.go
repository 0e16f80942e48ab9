// Minimal is the example of the README: one sequence, 100 tokens, attention's output.
package main

import (
	"fmt"
	"log"

	"kvrt"
)

func main() {
	model := kvrt.Model{Layers: []kvrt.Layer{{QueryHeads: 8, KVHeads: 2, KeyDim: 64}}}
	pool, err := kvrt.NewPool(kvrt.Config{ArenaBytes: 64 << 20}, model)
	check(err)
	defer pool.Close()
	sequence, err := pool.CreateSequence(kvrt.SequenceConfig{})
	check(err)
	k, v := make([]float32, 2*64), make([]float32, 2*64)
	q, out := make([]float32, 8*64), make([]float32, 8*64)
	for token := 1; token <= 100; token++ {
		v[0] = float32(token) // the engine computes keys, values and queries here
		step, err := pool.BeginStep()
		check(err)
		_, err = step.Append(sequence, 1, nil)
		check(err)
		_, err = step.Reserve(nil)
		check(err)
		check(step.WriteAttend(0, kvrt.Float32(k, 1, 2, 64), kvrt.Float32(v, 1, 2, 64),
			kvrt.Float32(q, 1, 8, 64), kvrt.Float32(out, 1, 8, 64), kvrt.AttendOptions{}))
		_, err = step.End()
		check(err)
	}
	fmt.Printf("the mean of 1 to 100 is %.1f\n", out[0])
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

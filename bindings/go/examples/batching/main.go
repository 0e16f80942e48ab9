// Batching replays a trace of a real model (docs/trace.md) in batches of several sequences, and
// compares what comes out: an engine's loop, without the engine's model.
//
//	batching TRACE [--slots N] [--arena-mib N] [--threads N]
//
// Exit status: 0 all as recorded, 1 something differs or failed, 2 the arguments were wrong.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"kvrt"
)

var (
	errDifferent      = errors.New("what came out differs from the recording")
	errWrongArguments = errors.New("wrong arguments")
)

func main() {
	err := batching(os.Args[1:], os.Stdout, os.Stderr)
	if errors.Is(err, errWrongArguments) {
		os.Exit(2) // the flags have said what is wrong
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "batching:", err)
		os.Exit(1)
	}
}

func batching(arguments []string, out, complaints io.Writer) error {
	path, given, err := parse(arguments, complaints)
	if err != nil {
		return err
	}
	recorded, err := readTrace(path)
	if err != nil {
		return err
	}
	found, err := run(recorded, given)
	if err != nil {
		return err
	}
	if err := found.print(out); err != nil {
		return err
	}
	for _, kind := range []kvrt.LiveKind{kvrt.LivePools, kvrt.LiveSequences, kvrt.LiveSteps} {
		if kvrt.LiveCount(kind) != 0 {
			return errors.New("something of the library is still alive")
		}
	}
	if !found.allEqual() {
		return errDifferent
	}
	return nil
}

// parse takes the options on either side of the trace's path.
func parse(arguments []string, complaints io.Writer) (path string, given limits, err error) {
	flags := flag.NewFlagSet("batching", flag.ContinueOnError)
	flags.SetOutput(complaints)
	flags.Usage = func() {
		fmt.Fprintln(complaints, "usage: batching TRACE [--slots N] [--arena-mib N] [--threads N]")
		flags.PrintDefaults()
	}
	flags.UintVar(&given.slots, "slots", 3, "`sequences` that run at once, 1 to 4096")
	flags.UintVar(&given.arenaMiB, "arena-mib", 8, "`MiB` of keys and values, 2 to 131072")
	flags.UintVar(&given.threads, "threads", 1, "`threads` of the library, 1 to 256")
	paths := []string{}
	for len(arguments) > 0 {
		if err := flags.Parse(arguments); err != nil {
			return "", given, errWrongArguments
		}
		if arguments = flags.Args(); len(arguments) > 0 {
			paths = append(paths, arguments[0])
			arguments = arguments[1:]
		}
	}
	inRange := given.slots >= 1 && given.slots <= 4096 && given.arenaMiB >= 2 &&
		given.arenaMiB <= 131072 && given.threads >= 1 && given.threads <= 256
	if len(paths) != 1 || !inRange {
		fmt.Fprintln(complaints, "batching: one trace, and numbers within their bounds")
		flags.Usage()
		return "", given, errWrongArguments
	}
	return paths[0], given, nil
}

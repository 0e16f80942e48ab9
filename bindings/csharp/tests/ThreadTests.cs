// Threads: two at once on a plain pool are told so, a thread-safe pool orders them.
using System;
using System.Diagnostics;
using System.Threading;

namespace Kvrt.Tests
{
    internal static class ThreadTests
    {
        /// <summary>Runs the action on two threads at once, and returns the first
        /// exception.</summary>
        private static Exception OnTwoThreads(Action<int> action)
        {
            Exception first = null;
            var threads = new Thread[2];
            using (var together = new Barrier(threads.Length))
            {
                for (int i = 0; i < threads.Length; ++i)
                {
                    int index = i;
                    threads[i] = new Thread(() =>
                    {
                        try
                        {
                            together.SignalAndWait();
                            action(index);
                        }
                        catch (Exception error)
                        {
                            Interlocked.CompareExchange(ref first, error, null);
                        }
                    });
                    threads[i].Start();
                }
                foreach (Thread thread in threads)
                {
                    thread.Join();
                }
            }
            return first;
        }

        /// <summary>While one thread is inside a call, held there by the loop hook, another call is
        /// refused, and the first goes on unharmed.</summary>
        [Test]
        public static void TwoThreadsAtOnceOnAPlainPoolAreAnError()
        {
            using (var inside = new ManualResetEventSlim())
            using (var refused = new ManualResetEventSlim())
            {
                var hooks = new Hooks
                {
                    ParallelFor = (count, body) =>
                    {
                        inside.Set();
                        refused.Wait();
                        for (uint i = 0; i < count; ++i)
                        {
                            body(i);
                        }
                    }
                };
                using (var engine = new Engine(config => config.Hooks = hooks))
                {
                    Sequence sequence = engine.Pool.CreateSequence();
                    Exception failure = null;
                    var worker = new Thread(() =>
                    {
                        try
                        {
                            engine.Run(sequence, 1, 100);
                        }
                        catch (Exception error)
                        {
                            failure = error;
                        }
                    });
                    Step other = engine.Pool.BeginStep();
                    worker.Start();
                    inside.Wait();
                    Check.Fails(Status.Invalid, "another thread is inside",
                                () => engine.Pool.GetInfo(sequence));
                    Check.Fails(Status.Invalid, "another thread is inside", () => other.End());
                    Check.Equal(2u, engine.Pool.GetStats().OpenSteps, "counters are for all");
                    refused.Set();
                    worker.Join();
                    Check.True(failure == null, "the first call: " + failure);
                    other.Dispose(); // it was not ended, and is cancelled now
                    Check.True(!other.IsOpen, "closed");
                    Check.Equal(0u, engine.Pool.GetStats().OpenSteps, "open steps");
                    engine.CheckNext(sequence, 1);
                    engine.Pool.Check();
                }
            }
        }

        [Test]
        public static void AThreadSafePoolOrdersThreads()
        {
            using (var engine = new Engine(config => config.Options = PoolOptions.ThreadSafe))
            {
                Sequence[] sequences =
                    { engine.Pool.CreateSequence(), engine.Pool.CreateSequence() };
                Exception error = OnTwoThreads(index =>
                {
                    for (int i = 0; i < 20; ++i)
                    {
                        engine.Run(sequences[index], (uint)index, 5);
                    }
                });
                Check.True(error == null, "error: " + error);
                engine.CheckNext(sequences[0], 0);
                engine.CheckNext(sequences[1], 1);
                engine.Pool.Check();
                Check.Equal(42UL, engine.Pool.GetStats().StepsEnded, "steps");
            }
        }

        /// <summary>A step handle that one thread gives back is soon another thread's. Each thread
        /// has one step at a time and keeps it until it disposes it, whether its End failed or not.
        /// </summary>
        [Test]
        public static void AThreadsStepIsNotClosedByAnother()
        {
            using (var engine = new Engine(config => config.Options = PoolOptions.ThreadSafe))
            {
                Pool pool = engine.Pool;
                Sequence[] sequences = { pool.CreateSequence(), pool.CreateSequence() };
                var clock = Stopwatch.StartNew();
                Exception error = OnTwoThreads(index =>
                {
                    for (int round = 0; clock.ElapsedMilliseconds < 3000; ++round)
                    {
                        using (Step step = pool.BeginStep())
                        {
                            step.Append(sequences[index], 1);
                            if (round % 4 == 0) // not reserved: the step is cancelled
                            {
                                Check.Fails(Status.Invalid, "reserve", () => step.End());
                                Check.True(!step.IsOpen, "closed by the End that failed");
                            }
                        }
                    }
                });
                Check.True(error == null, "error: " + error);
                Check.Equal(0u, pool.GetStats().OpenSteps, "open steps");
                pool.Check();
            }
        }

        /// <summary>A message belongs to its thread.</summary>
        [Test]
        public static void EachThreadGetsTheMessageOfItsOwnError()
        {
            using (var engine = new Engine(config => config.Options = PoolOptions.ThreadSafe))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                Exception error = OnTwoThreads(index =>
                {
                    for (uint i = 0; i < 500; ++i)
                    {
                        uint layer = 2 + 1000 * (uint)index + i;
                        Check.Fails(Status.Invalid, $"layer {layer} of",
                                    () => engine.Pool.GetLayerInfo(sequence, layer));
                    }
                });
                Check.True(error == null, "error: " + error);
            }
        }
    }
}

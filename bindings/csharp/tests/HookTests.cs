// Hooks: each is called, none lets an exception into the library, and a loop hook that misbehaves
// does no harm.
using System;
using System.Collections.Concurrent;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.InteropServices;
using System.Threading;

namespace Kvrt.Tests
{
    internal static class HookTests
    {
        private sealed class HookFailure : Exception { }

        private static Engine With(Hooks hooks, PoolOptions options = PoolOptions.None)
        {
            return new Engine(config =>
            {
                config.Hooks = hooks;
                config.Options = options;
            });
        }

        /// <summary>Memory for hooks, aligned by hand: the real start lies in front of
        /// it.</summary>
        private static IntPtr Allocate(ulong bytes, ulong alignment)
        {
            long start = Marshal.AllocHGlobal(checked((int)(bytes + alignment + 8))).ToInt64();
            long aligned = (start + 8 + (long)alignment - 1) / (long)alignment * (long)alignment;
            Marshal.WriteInt64((IntPtr)(aligned - 8), start);
            return (IntPtr)aligned;
        }

        private static void Release(IntPtr memory)
        {
            Marshal.FreeHGlobal((IntPtr)Marshal.ReadInt64(memory - 8));
        }

        [Test]
        public static void MemoryComesFromTheHostAndGoesBack()
        {
            var held = new Dictionary<IntPtr, ulong>();
            var hooks = new Hooks
            {
                Allocate = (bytes, alignment) =>
                {
                    IntPtr memory = Allocate(bytes, alignment);
                    held.Add(memory, bytes);
                    return memory;
                },
                Release = (memory, bytes, alignment) =>
                {
                    Check.Equal(held[memory], bytes, "bytes given back");
                    held.Remove(memory);
                    Release(memory);
                }
            };
            using (Engine engine = With(hooks))
            {
                PoolStats stats = engine.Pool.GetStats();
                Check.True(held.Count > 1, "allocations");
                Check.Equal((ulong)held.Count, stats.HostAllocations, "allocations as counted");
                Check.Equal((ulong)held.Values.Sum(bytes => (long)bytes), stats.MetadataBytes,
                            "bytes");
                int before = held.Count;
                engine.Run(engine.Pool.CreateSequence(), 1, 50);
                Check.Equal(before, held.Count, "allocations after a step");
            }
            Check.Equal(0, held.Count, "held after the pool");
        }

        [Test]
        public static void RefusedMemoryIsNoMemory()
        {
            int calls = 0;
            var hooks = new Hooks
            {
                Allocate = (bytes, alignment) => ++calls < 4 ? Allocate(bytes, alignment)
                                                             : IntPtr.Zero,
                Release = (memory, bytes, alignment) => Release(memory)
            };
            KvrtCapacityException error = Check.Throws<KvrtCapacityException>(
                () => With(hooks), "refused");
            Check.Equal(Status.NoMemory, error.Status, "status");
            Check.True(error.InnerException == null, "nothing was thrown by the hook");
        }

        [Test]
        public static void AnAllocatorThatThrowsIsBehindTheError()
        {
            var hooks = new Hooks
            {
                Allocate = (bytes, alignment) => { throw new HookFailure(); },
                Release = (memory, bytes, alignment) => { }
            };
            KvrtCapacityException error = Check.Throws<KvrtCapacityException>(
                () => With(hooks), "thrown");
            Check.True(error.InnerException is HookFailure, "inner: " + error.InnerException);
        }

        [Test]
        public static void MisalignedMemoryIsRefused()
        {
            int held = 0;
            var hooks = new Hooks
            {
                Allocate = (bytes, alignment) =>
                {
                    ++held;
                    return Allocate(bytes + 1, alignment) + 1;
                },
                Release = (memory, bytes, alignment) =>
                {
                    --held;
                    Release(memory - 1);
                }
            };
            KvrtCapacityException error = Check.Throws<KvrtCapacityException>(
                () => With(hooks), "misaligned");
            Check.Contains("not aligned", error.InnerException.Message, "inner");
            Check.Equal(0, held, "given back");
        }

        [Test]
        public static void AllocateAndReleaseComeTogether()
        {
            Check.Fails(Status.Invalid, "come together",
                        () => With(new Hooks { Allocate = Allocate }));
        }

        [Test]
        public static void AReleaseThatThrowsIsThrownByDispose()
        {
            var hooks = new Hooks
            {
                Allocate = Allocate,
                Release = (memory, bytes, alignment) =>
                {
                    Release(memory);
                    throw new HookFailure();
                }
            };
            Engine engine = With(hooks);
            Check.Throws<HookFailure>(() => engine.Dispose(), "Dispose");
            engine.Dispose();
        }

        [Test]
        public static void TheClockIsTheHosts()
        {
            ulong now = 1000;
            using (Engine engine = With(new Hooks { Now = () => now += 500 }))
            {
                Sequence sequence = engine.Pool.CreateSequence(
                    new Policy { Scorer = Scorer.Streaming, Budget = 8 });
                engine.Run(sequence, 1, 40);
                ulong nanoseconds = engine.Pool.Compress(sequence).Nanoseconds;
                Check.True(nanoseconds != 0 && nanoseconds % 500 == 0, $"{nanoseconds} ns");
            }
        }

        [Test]
        public static void AClockThatThrowsIsThrownByItsCall()
        {
            bool broken = false;
            var hooks = new Hooks { Now = () => broken ? throw new HookFailure() : 1UL };
            using (Engine engine = With(hooks))
            {
                Sequence sequence = engine.Pool.CreateSequence(
                    new Policy { Scorer = Scorer.Streaming, Budget = 8 });
                engine.Run(sequence, 1, 40);
                broken = true;
                Check.Throws<HookFailure>(() => engine.Pool.Compress(sequence), "the call");
                broken = false;
                Check.Equal(8UL, engine.Pool.GetLayerInfo(sequence, 0).Retained, "the round ran");
                engine.CheckNext(sequence, 1, Enumerable.Range(32, 9).ToArray());
            }
        }

        /// <summary>A pool whose guards a kernel has overwritten logs what the check
        /// found.</summary>
        [Test]
        public static void TheLogGetsTheLibrarysLines()
        {
            var lines = new List<string>();
            bool broken = false;
            var hooks = new Hooks
            {
                Log = (level, text) =>
                {
                    lines.Add($"{level}: {text}");
                    if (broken)
                    {
                        throw new HookFailure();
                    }
                }
            };
            using (Engine engine = With(hooks, PoolOptions.Debug))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, 1, 5);
                engine.Pool.Check();
                Check.Equal(0, lines.Count, "lines so far");
                DamageGuard(engine.Pool, sequence);
                KvrtInternalException error = Check.Throws<KvrtInternalException>(
                    () => engine.Pool.Check(), "Check");
                Check.SameElements(new[] { "Error: " + error.Message }, lines, "lines");
                broken = true;
                error = Check.Throws<KvrtInternalException>(() => engine.Pool.Check(), "Check");
                Check.True(error.InnerException is HookFailure, "what the hook threw is behind it");
            }
        }

        private static unsafe void DamageGuard(Pool pool, Sequence sequence)
        {
            var indices = new int[1];
            using (Step step = pool.BeginStep())
            {
                step.Append(sequence, 1);
                step.Reserve();
                ExportedTables tables = step.Export(0, new TableBuffers { Indices = indices });
                byte* block = (byte*)tables.Base + indices[0] * tables.BlockStride;
                block[tables.BlockBytes] ^= 1;
            }
        }

        [Test]
        public static void ALoopOfTheHostGivesTheSameBits()
        {
            float[][] expected;
            using (var engine = new Engine())
            {
                expected = RunOnce(engine);
            }
            var counts = new ConcurrentBag<uint>();
            ParallelLoop[] loops =
            {
                (count, body) => OnThreads(counts, count, body),
                (count, body) => { for (uint i = count; i > 0; --i) { body(i - 1); } },
                (count, body) => { },                  // leaves everything out
                (count, body) => body(count - 1)       // and all but one
            };
            foreach (ParallelLoop loop in loops)
            {
                using (Engine engine = With(new Hooks { ParallelFor = loop }))
                {
                    float[][] actual = RunOnce(engine);
                    Check.SameElements(expected[0].Concat(expected[1]),
                                       actual[0].Concat(actual[1]), "results");
                }
            }
            Check.True(counts.Any(count => count > 1), "loops had several indices");
        }

        private static float[][] RunOnce(Engine engine)
        {
            Sequence sequence = engine.Pool.CreateSequence();
            using (Step step = engine.Pool.BeginStep())
            {
                float[][] results = engine.Forward(step, sequence, 1, 300);
                step.End();
                return results;
            }
        }

        private static void OnThreads(ConcurrentBag<uint> counts, uint count, Action<uint> body)
        {
            counts.Add(count);
            var threads = new Thread[2];
            for (uint t = 0; t < 2; ++t)
            {
                uint first = t;
                threads[t] = new Thread(() =>
                {
                    for (uint i = first; i < count; i += 2)
                    {
                        body(i);
                    }
                });
                threads[t].Start();
            }
            foreach (Thread thread in threads)
            {
                thread.Join();
            }
        }

        [Test]
        public static void ALoopThatThrowsIsThrownByItsCallAndResultsAreRight()
        {
            var hooks = new Hooks
            {
                ParallelFor = (count, body) =>
                {
                    body(0);
                    throw new HookFailure();
                }
            };
            using (Engine engine = With(hooks))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                var layout = new TensorLayout(1, Engine.KvHeads, Engine.Dim);
                float[] keys = Engine.Row(0, 1, 0, 0);
                using (Step step = engine.Pool.BeginStep())
                {
                    step.Append(sequence, 1);
                    step.Reserve();
                    for (uint layer = 0; layer < 2; ++layer)
                    {
                        Check.Throws<HookFailure>(() => step.Write(
                            layer, ReadOnlyTensor.Float32(keys, layout),
                            ReadOnlyTensor.Float32(keys, layout)), "Write");
                    }
                    step.End();
                }
                Check.Equal(1UL, engine.Pool.GetInfo(sequence).Accepted, "accepted");
                engine.Pool.Check();
            }
        }

        [Test]
        public static void ALoopsBodyRefusesWhatIsWrong()
        {
            Action<uint> kept = null;
            var errors = new List<string>();
            var hooks = new Hooks
            {
                ParallelFor = (count, body) =>
                {
                    kept = body;
                    body(0);
                    foreach (uint index in new[] { 0u, count, uint.MaxValue })
                    {
                        try
                        {
                            body(index);
                        }
                        catch (Exception error)
                        {
                            errors.Add(error.GetType().Name);
                        }
                    }
                }
            };
            using (Engine engine = With(hooks))
            {
                engine.Run(engine.Pool.CreateSequence(), 1, 1);
                Check.SameElements(new[] { "InvalidOperationException",
                                           "ArgumentOutOfRangeException",
                                           "ArgumentOutOfRangeException" }, errors.Take(3),
                                   "errors");
                Check.Throws<InvalidOperationException>(() => kept(0), "a loop that is over");
            }
            Check.Throws<InvalidOperationException>(() => kept(0), "a pool that is gone");
        }

        /// <summary>A body that the hook keeps and calls later, of an index that it left out.
        /// </summary>
        [Test]
        public static void NothingRunsWhenTheLoopIsOver()
        {
            Action<uint> kept = null;
            var hooks = new Hooks { ParallelFor = (count, body) => kept = body };
            using (Engine engine = With(hooks))
            {
                engine.Run(engine.Pool.CreateSequence(), 1, 1);
                InvalidOperationException error =
                    Check.Throws<InvalidOperationException>(() => kept(0), "the call is over");
                Check.Contains("The loop is over", error.Message, "message");
            }
        }

        /// <summary>One thread's clock throws, and the other's does not: each call has its own
        /// outcome.</summary>
        [Test]
        public static void WhatAHookThrowsBelongsToItsThread()
        {
            int throwing = 0; // the thread whose clock throws
            var hooks = new Hooks
            {
                Now = () => Thread.CurrentThread.ManagedThreadId == throwing
                                ? throw new HookFailure() : 1UL
            };
            using (Engine engine = With(hooks, PoolOptions.ThreadSafe))
            {
                var policy = new Policy { Scorer = Scorer.Streaming, Budget = 8 };
                Sequence first = engine.Pool.CreateSequence(policy);
                Sequence second = engine.Pool.CreateSequence(policy);
                bool done = false;
                Exception foreign = null;
                throwing = Thread.CurrentThread.ManagedThreadId;
                var other = new Thread(() =>
                {
                    try
                    {
                        while (!Volatile.Read(ref done))
                        {
                            engine.Pool.Compress(second);
                        }
                    }
                    catch (Exception error)
                    {
                        foreign = error;
                    }
                });
                other.Start();
                int own = 0;
                for (int i = 0; i < 20000; ++i)
                {
                    try
                    {
                        engine.Pool.Compress(first);
                    }
                    catch (HookFailure)
                    {
                        ++own;
                    }
                }
                Volatile.Write(ref done, true);
                other.Join();
                Check.True(foreign == null, "the other thread's call: " + foreign);
                Check.Equal(20000, own, "exceptions of this thread's calls");
            }
        }

        /// <summary>A hook that makes another pool, whose own hook throws in its creation.
        /// </summary>
        [Test]
        public static void WhatAnInnerPoolsHookThrowsIsTheInnerPools()
        {
            Exception inner = null;
            var failing = new Hooks
            {
                Allocate = (bytes, alignment) => { throw new HookFailure(); },
                Release = (memory, bytes, alignment) => { }
            };
            var hooks = new Hooks
            {
                Now = () =>
                {
                    inner = Check.Throws<KvrtCapacityException>(() => With(failing), "creation");
                    return 1;
                }
            };
            using (Engine engine = With(hooks))
            {
                engine.Pool.Compress(engine.Pool.CreateSequence(
                    new Policy { Scorer = Scorer.Streaming, Budget = 8 }));
                Check.True(inner.InnerException is HookFailure, "inner: " + inner.InnerException);
            }
        }

        [Test]
        public static void AHookMayReadCounters()
        {
            Engine engine = null;
            uint sequences = 0;
            ulong pinned = 0;
            int heads = 0;
            var hooks = new Hooks
            {
                Now = () =>
                {
                    sequences = engine.Pool.GetStats().Sequences;
                    pinned = engine.Pool.GetClassStats(0).Pinned;
                    heads = engine.Pool.GetLayerStats(1).SaturatedKeys.Count;
                    return 1;
                }
            };
            foreach (PoolOptions options in new[] { PoolOptions.None, PoolOptions.ThreadSafe })
            {
                using (engine = With(hooks, options))
                {
                    Sequence sequence = engine.Pool.CreateSequence(
                        new Policy { Scorer = Scorer.Streaming, Budget = 8 });
                    engine.Run(sequence, 1, 10);
                    sequences = 0;
                    engine.Pool.Compress(sequence);
                    Check.Equal(1u, sequences, "sequences");
                    Check.True(pinned != 0, "pinned blocks");
                    Check.Equal((int)Engine.KvHeads, heads, "heads of a layer");
                }
            }
        }

        [Test]
        public static void CallingBackIsAnError()
        {
            Engine engine = null;
            var hooks = new Hooks { Now = () => { engine.Pool.Check(); return 1; } };
            using (engine = With(hooks, PoolOptions.ThreadSafe))
            {
                Sequence sequence = engine.Pool.CreateSequence(
                    new Policy { Scorer = Scorer.Streaming, Budget = 8 });
                engine.Run(sequence, 1, 40);
                Check.Fails(Status.Invalid, "a hook calls back",
                            () => engine.Pool.Compress(sequence));
                engine.CheckNext(sequence, 1, Enumerable.Range(32, 9).ToArray());
            }
        }
    }
}

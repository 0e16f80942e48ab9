// Disposing: pools with open steps, twice, by the collector, and while calls are inside.
using System;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Kvrt.Tests
{
    internal static class LifetimeTests
    {
        [Test]
        public static void AClosedPoolIsAnError()
        {
            var engine = new Engine();
            Pool pool = engine.Pool;
            Sequence sequence = pool.CreateSequence();
            Step open = pool.BeginStep();
            open.Append(sequence, 1);
            pool.Dispose();
            pool.Dispose();
            Action[] uses =
            {
                () => pool.GetStats(), () => pool.GetClassStats(0),
                () => pool.GetLayerStats(0), () => pool.PassFence(1), () => pool.Check(),
                () => pool.LoadStatistics("x"),
                () => pool.SetStatistics(new QueryStatistics(0, 4, 16)),
                () => pool.CreateSequence(), () => pool.ReleaseSequence(sequence),
                () => pool.Fork(sequence), () => pool.Fork(sequence, new Sequence[2]),
                () => pool.Truncate(sequence, 0), () => pool.SetPolicy(sequence, null),
                () => pool.Pin(sequence, 0, 1), () => pool.Unpin(sequence),
                () => pool.GetInfo(sequence), () => pool.GetLayerInfo(sequence, 0),
                () => pool.GetPositions(sequence, 0, 0, Span<uint>.Empty),
                () => pool.Compress(sequence), () => pool.SaveStatistics(sequence, "x"),
                () => pool.GetStatistics(sequence, new QueryStatistics(0, 4, 16)),
                () => pool.BeginStep(), () => open.Reserve(), () => open.End(), () => open.Cancel()
            };
            foreach (Action use in uses)
            {
                ObjectDisposedException error =
                    Check.Throws<ObjectDisposedException>(use, "closed pool");
                Check.Contains("The pool is closed", error.Message, "message");
            }
            open.Dispose(); // is no error
        }

        [Test]
        public static void ADisposedPoolTakesItsStepsAndSequencesAlong()
        {
            var engine = new Engine();
            engine.Pool.CreateSequence();
            engine.Pool.BeginStep();
            Check.Equal(1UL, Library.LiveCount(LiveKind.Steps), "steps");
            engine.Dispose();
            Check.Equal(0UL, Library.LiveCount(LiveKind.Steps), "steps afterwards");
        }

        [Test]
        public static void TheCollectorReleasesForgottenPools()
        {
            Forget(3);
            for (int i = 0; i < 50 && Library.LiveCount(LiveKind.Pools) != 0; ++i)
            {
                GC.Collect();
                GC.WaitForPendingFinalizers();
                OverwriteStack(40);
            }
            // The runner checks that none is left.
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        private static void Forget(int count)
        {
            // mono scans stacks conservatively: another thread's stack is gone when it ends.
            var thread = new Thread(() =>
            {
                for (int i = 0; i < count; ++i)
                {
                    new Engine(config => config.Hooks = new Hooks { Now = () => 1 })
                        .Pool.CreateSequence();
                }
            });
            thread.Start();
            thread.Join();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        private static int OverwriteStack(int depth)
        {
            return depth == 0 ? 0 : OverwriteStack(depth - 1) + 1;
        }

        /// <summary>Dispose on one thread while others are inside calls: each call ends well or is
        /// told that the pool is closed, and the pool goes when the last call has left.</summary>
        [Test]
        public static void DisposingDuringCallsIsSafe()
        {
            for (int round = 0; round < 50; ++round)
            {
                var engine = new Engine(config => config.Options = PoolOptions.ThreadSafe);
                Sequence sequence = engine.Pool.CreateSequence();
                Exception unexpected = null;
                var threads = new Thread[2];
                using (var started = new CountdownEvent(threads.Length))
                {
                    for (int i = 0; i < threads.Length; ++i)
                    {
                        threads[i] = new Thread(() =>
                        {
                            started.Signal();
                            unexpected = UseUntilClosed(engine, sequence) ?? unexpected;
                        });
                        threads[i].Start();
                    }
                    started.Wait();
                    Thread.SpinWait(round * 2000);
                    engine.Dispose();
                    foreach (Thread thread in threads)
                    {
                        thread.Join();
                    }
                }
                Check.True(unexpected == null, "unexpected: " + unexpected);
                Check.Equal(0UL, Library.LiveCount(LiveKind.Pools), "pools");
            }
        }

        private static Exception UseUntilClosed(Engine engine, Sequence sequence)
        {
            try
            {
                while (true)
                {
                    engine.Pool.GetInfo(sequence);
                    engine.Pool.ReleaseSequence(engine.Pool.Fork(sequence));
                    using (Step step = engine.Pool.BeginStep())
                    {
                        step.Cancel();
                    }
                }
            }
            catch (ObjectDisposedException)
            {
                return null;
            }
            catch (Exception error)
            {
                return error;
            }
        }
    }
}

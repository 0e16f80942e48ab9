// Steps: drafts, cancelling, running out of space, and the life of a step.
using System;
using System.Linq;

namespace Kvrt.Tests
{
    internal static class StepTests
    {
        [Test]
        public static void DraftsAreAcceptedAndTheRestRolledBack()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                engine.Run(sequence, 1, 14);
                using (Step step = pool.BeginStep())
                {
                    engine.Forward(step, sequence, 1, 5); // into a second block
                    step.Accept(sequence, 2);
                    Check.Equal(2UL, step.End().AcceptedTokens, "accepted");
                }
                Check.Equal(16UL, pool.GetInfo(sequence).Accepted, "accepted in all");
                Check.Equal(2UL, pool.GetInfo(sequence).Blocks, "one block in each of two layers");
                engine.CheckNext(sequence, 1);
                pool.Check();
            }
        }

        [Test]
        public static void ABatchOfDraftsIsAcceptedInOneCall()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence[] sequences = { pool.CreateSequence(), pool.CreateSequence() };
                using (Step step = pool.BeginStep())
                {
                    step.AppendBatch(sequences, new uint[] { 4, 3 });
                    step.Reserve();
                    Write(step, 7);
                    Check.Fails(Status.Invalid, "item 1: ",
                                () => step.AcceptBatch(sequences, new uint[] { 4, 4 }));
                    step.AcceptBatch(sequences, new uint[] { 3, 0 });
                    step.End();
                }
                Check.Equal(3UL, pool.GetInfo(sequences[0]).Accepted, "of the first");
                Check.Equal(0UL, pool.GetInfo(sequences[1]).Accepted, "of the second");
            }
        }

        /// <summary>Zeros into both layers.</summary>
        private static void Write(Step step, uint rows)
        {
            var layout = new TensorLayout(rows, Engine.KvHeads, Engine.Dim);
            var zeros = new float[rows * Engine.KvHeads * Engine.Dim];
            for (uint layer = 0; layer < 2; ++layer)
            {
                step.Write(layer, ReadOnlyTensor.Float32(zeros, layout),
                           ReadOnlyTensor.Float32(zeros, layout));
            }
        }

        [Test]
        public static void CancelUndoesAll()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                engine.Run(sequence, 1, 10);
                ulong blocks = pool.GetStats().LiveBlocks;
                Step step = pool.BeginStep();
                engine.Forward(step, sequence, 1, 50);
                step.Cancel();
                Check.True(!step.IsOpen, "closed");
                Check.Equal(10UL, pool.GetInfo(sequence).Accepted, "accepted");
                Check.Equal(blocks, pool.GetStats().LiveBlocks, "blocks");
                engine.CheckNext(sequence, 1);
            }
        }

        [Test]
        public static void DisposeCancelsWhatHasNotEnded()
        {
            using (var engine = new Engine())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                using (Step step = engine.Pool.BeginStep())
                {
                    engine.Forward(step, sequence, 1, 50);
                }
                Check.Equal(0u, engine.Pool.GetStats().OpenSteps, "open steps");
                Check.Equal(1UL, engine.Pool.GetStats().StepsCancelled, "cancelled steps");
                Check.Equal(0UL, engine.Pool.GetInfo(sequence).Accepted, "accepted");
            }
        }

        [Test]
        public static void AClosedStepIsAnError()
        {
            using (var engine = new Engine())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                Step step = engine.Pool.BeginStep();
                Step copy = step;
                engine.Forward(step, sequence, 1, 1);
                step.End();
                step.Dispose();
                copy.Dispose();
                var layout = new TensorLayout(1, 2, 32);
                Action[] uses =
                {
                    () => step.Append(sequence, 1), () => copy.Append(sequence, new uint[] { 1 }),
                    () => step.AppendBatch(new[] { sequence }, new uint[] { 1 }),
                    () => step.Reserve(), () => step.TryReserve(out _),
                    () => step.Remove(sequence), () => step.Accept(sequence, 1),
                    () => step.AcceptBatch(new[] { sequence }, new uint[] { 1 }),
                    () => step.Write(0, ReadOnlyTensor.Float32(new float[64], layout),
                                     ReadOnlyTensor.Float32(new float[64], layout)),
                    () => step.Attend(0, ReadOnlyTensor.Float32(new float[64], layout),
                                      Tensor.Float32(new float[64], layout)),
                    () => step.Export(0, default), () => step.TryExport(0, default, out _),
                    () => copy.End(), () => copy.Cancel()
                };
                foreach (Action use in uses)
                {
                    ObjectDisposedException error =
                        Check.Throws<ObjectDisposedException>(use, "closed step");
                    Check.Contains("The step is closed", error.Message, "message");
                }
            }
        }

        /// <summary>The library hands its step handles out in turn; an old step must not act on the
        /// step that has its handle now.</summary>
        [Test]
        public static void AnOldStepIsNotTheNewOneOfTheSameHandle()
        {
            using (var engine = new Engine())
            {
                Step old = engine.Pool.BeginStep();
                old.Cancel();
                for (int i = 0; i < 40; ++i)
                {
                    using (Step step = engine.Pool.BeginStep())
                    {
                        Check.Throws<ObjectDisposedException>(() => old.Cancel(), "the old step");
                        Check.True(step.IsOpen && !old.IsOpen, "which is open");
                    }
                }
            }
        }

        [Test]
        public static void AStepThatNeverBeganIsAnError()
        {
            Step none = default;
            none.Dispose();
            Check.True(!none.IsOpen, "not open");
            Check.Throws<InvalidOperationException>(() => none.Reserve(), "the default step");
        }

        [Test]
        public static void AFailedEndLeavesNothingOpen()
        {
            using (var engine = new Engine())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                Step failed = default;
                Check.Fails(Status.Invalid, "layer 0", () =>
                {
                    using (failed = engine.Pool.BeginStep())
                    {
                        failed.Append(sequence, 3);
                        failed.Reserve();
                        failed.End(); // nothing was written
                    }
                });
                Check.Fails(Status.Invalid, "ended or cancelled", () => failed.Cancel());
                Check.Equal(0u, engine.Pool.GetStats().OpenSteps, "open steps");
                Check.Equal(0UL, engine.Pool.GetInfo(sequence).Accepted, "accepted");
                engine.CheckNext(sequence, 1);
            }
        }

        [Test]
        public static void TwoStepsAreOpenAtOnceAndNoThird()
        {
            using (var engine = new Engine())
            {
                Sequence first = engine.Pool.CreateSequence();
                Sequence second = engine.Pool.CreateSequence();
                using (Step one = engine.Pool.BeginStep())
                using (Step two = engine.Pool.BeginStep())
                {
                    Check.Fails(Status.Limit, "", () => engine.Pool.BeginStep());
                    one.Append(first, 1);
                    Check.Fails(Status.Invalid, "", () => two.Append(first, 1));
                    two.Append(second, 1);
                }
            }
        }

        /// <summary>An arena of one slab: 2 MiB hold 512 blocks of 16 tokens, 2 heads and 2 * 32
        /// half precision numbers. 4000 tokens in two layers take 500.</summary>
        [Test]
        public static void WithoutRoomReserveSaysSoAndTheStepGoesOn()
        {
            using (var engine = new Engine(config => config.ArenaBytes = 2 << 20))
            {
                Pool pool = engine.Pool;
                Sequence[] sequences = { pool.CreateSequence(), pool.CreateSequence() };
                using (Step step = pool.BeginStep())
                {
                    step.AppendBatch(sequences, new uint[] { 4000, 4000 });
                    var statuses = new[] { (Status)1, (Status)1, (Status)1 };
                    Check.True(!step.TryReserve(out ReserveReport report, statuses), "not now");
                    Check.Equal(1u, report.ItemsThatFit, "items that fit");
                    Check.Equal(1000UL, report.NeedBlocks, "blocks needed");
                    Check.True(report.NeedBytes > report.FreeBytesNow, "bytes");
                    Check.SameElements(new[] { Status.Ok, Status.Again, (Status)1 }, statuses,
                                       "statuses of items");
                    KvrtCapacityException again = Check.Throws<KvrtCapacityException>(
                        () => step.Reserve(), "Reserve");
                    Check.Equal(Status.Again, again.Status, "status");
                    Check.Equal(Category.Capacity, again.Category, "category");
                    step.Remove(sequences[1]);
                    Check.True(step.TryReserve(out report), "with one of them");
                    Write(step, 4000);
                    step.End();
                }
                Check.Equal(4000UL, pool.GetInfo(sequences[0]).Accepted, "accepted");
            }
        }

        [Test]
        public static void WhatNeverFitsIsTooLarge()
        {
            using (var engine = new Engine(config =>
            {
                config.ArenaBytes = 2 << 20;
                config.MaxStepTokens = 100000;
            }))
            using (Step step = engine.Pool.BeginStep())
            {
                step.Append(engine.Pool.CreateSequence(), 20000);
                var statuses = new Status[1];
                Check.Fails(Status.TooLarge, "", () => step.TryReserve(out _, statuses));
                Check.Equal(Status.TooLarge, statuses[0], "of the item");
            }
        }

        [Test]
        public static void LimitsOfAStepHold()
        {
            using (var engine = new Engine(config =>
            {
                config.MaxStepSequences = 1;
                config.MaxStepTokens = 100;
                config.MaxTokensPerSequence = 50;
            }))
            using (Step step = engine.Pool.BeginStep())
            {
                Sequence sequence = engine.Pool.CreateSequence();
                Check.Fails(Status.Limit, "max_step_tokens", () => step.Append(sequence, 101));
                Check.Fails(Status.Limit, "max_step_sequences", () => step.AppendBatch(
                    new[] { sequence, engine.Pool.CreateSequence() }, new uint[] { 1, 1 }));
                step.Append(sequence, 51);
                Check.Fails(Status.Limit, "max_tokens_per_sequence", () => step.Reserve());
            }
        }

        /// <summary>With host fences, freed blocks wait until the host says that they were read.
        /// </summary>
        [Test]
        public static void FencesHoldBlocksBack()
        {
            using (var engine = new Engine(config => config.Options = PoolOptions.HostFences))
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                StepReport report = engine.Run(sequence, 1, 20);
                Check.True(report.Fence != 0, "a fence");
                pool.ReleaseSequence(sequence);
                Check.Equal(4UL, pool.GetStats().Parked, "parked");
                Check.Fails(Status.Invalid, "fence", () => pool.PassFence(report.Fence + 1));
                pool.PassFence(report.Fence);
                Check.Equal(0UL, pool.GetStats().Parked, "parked after the fence");
            }
        }

        [Test]
        public static void CountersOfThePoolAreTrue()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence();
                engine.Run(sequence, 1, 33);
                PoolStats stats = pool.GetStats();
                Check.Equal(1UL, stats.StepsEnded, "steps ended");
                Check.Equal(33UL, stats.TokensAccepted, "tokens accepted");
                Check.Equal(6UL, stats.LiveBlocks, "live blocks: three in each of two layers");
                Check.Equal(1u, stats.Sequences, "sequences");
                Check.Equal(8UL << 20, stats.ArenaBytes, "arena");
                Check.Equal(stats.Total,
                            stats.Free + stats.Cached + stats.Pinned + stats.Parked + stats.Loading,
                            "sum of states");
                Check.Equal(1u, stats.Classes, "classes of blocks");
                ClassStats blocks = pool.GetClassStats(0);
                Check.Equal(6UL, blocks.Pinned, "pinned");
                Check.Equal(16UL * 2 * 2 * 32 * 2, blocks.BlockBytes, "bytes of a block");
                Check.Fails(Status.Invalid, "class_index", () => pool.GetClassStats(1));
                Check.Equal(1UL, Library.LiveCount(LiveKind.Pools), "live pools");
                Check.Equal(1UL, Library.LiveCount(LiveKind.Sequences), "live sequences");
            }
        }
    }
}

// Policies by scores of the host and by observed attention, budgets shared among heads, what a
// policy takes and what it has done.
using System;
using System.Linq;

namespace Kvrt.Tests
{
    internal static class PolicyTests
    {
        private const int Heads = (int)Engine.KvHeads, Dim = (int)Engine.Dim;

        /// <summary>One layer in f32 whose policies may keep scores.</summary>
        private static Engine Observing(bool lanePerHead = false)
        {
            return new Engine(config => config.MaxObservedSequences = 2, layer =>
            {
                layer.KeyFormat = StorageFormat.Float32;
                layer.LanePerHead = lanePerHead;
            }, 1);
        }

        private static float[] ScoresOf(Pool pool, Sequence sequence, uint head)
        {
            var scores = new float[pool.GetScores(sequence, 0, head, Span<float>.Empty)];
            Check.Equal((ulong)scores.Length, pool.GetScores(sequence, 0, head, scores), "scores");
            return scores;
        }

        private static uint[] PositionsOf(Pool pool, Sequence sequence, uint head)
        {
            var positions =
                new uint[pool.GetPositions(sequence, 0, head, Span<uint>.Empty)];
            pool.GetPositions(sequence, 0, head, positions);
            return positions;
        }

        /// <summary>The positions with the largest numbers, ascending.</summary>
        private static uint[] Largest(double[] numbers, int count)
        {
            return Enumerable.Range(0, numbers.Length).OrderByDescending(i => numbers[i])
                .Take(count).OrderBy(i => i).Select(i => (uint)i).ToArray();
        }

        private static uint[] Span(int first, int end)
        {
            return Enumerable.Range(first, end - first).Select(i => (uint)i).ToArray();
        }

        [Test]
        public static void ScoresOfTheHostChooseWhoStays()
        {
            using (Engine engine = Observing())
            {
                Pool pool = engine.Pool;
                Sequence sequence =
                    pool.CreateSequence(new Policy { Scorer = Scorer.Host, Budget = 24 });
                engine.Run(sequence, 1, 100);
                Check.Equal(null, pool.GetInfo(sequence).LastOutcome, "before a round");
                Check.Equal(CompressOutcome.NoObservations, pool.Compress(sequence).Outcome,
                            "without scores");
                SequenceInfo info = pool.GetInfo(sequence);
                Check.Equal(CompressOutcome.NoObservations, info.LastOutcome, "last outcome");
                Check.Equal(Status.Ok, info.LastFailure, "last failure");

                Func<int, int, float> given = (head, position) =>
                    (position * 37 + head * 11) % 101;
                foreach (uint[] tokens in new[] { Span(0, 60), Span(60, 100) })
                {
                    float[] part = Enumerable.Range(0, Heads)
                        .SelectMany(head => tokens.Select(p => given(head, (int)p))).ToArray();
                    ulong first = tokens[0], count = (ulong)tokens.Length;
                    Check.Fails(Status.Invalid, "are needed", () => pool.SetScores(
                        sequence, 0, first, count, part.AsSpan(1)));
                    pool.SetScores(sequence, 0, first, count, part);
                }
                CompressReport report = pool.Compress(sequence);
                Check.Equal(CompressOutcome.Done, report.Outcome, "outcome");
                Check.Equal(0.0, report.LostAttention, "nothing was observed");
                for (int head = 0; head < Heads; ++head)
                {
                    double[] all = Enumerable.Range(0, 100)
                        .Select(position => (double)given(head, position)).ToArray();
                    uint[] kept = Largest(all, 24);
                    Check.SameElements(kept, PositionsOf(pool, sequence, (uint)head), "survivors");
                    Check.SameElements(kept.Select(p => given(head, (int)p)),
                                       ScoresOf(pool, sequence, (uint)head),
                                       "scores stay with their tokens");
                    RetentionInfo history = pool.GetRetention(sequence, 0, (uint)head);
                    Check.Equal((uint)head, history.KvHead, "head");
                    Check.Equal(1UL, history.Rounds, "rounds");
                    Check.Equal(76UL, history.TokensRemoved, "tokens removed");
                    Check.Equal(5UL, history.BlocksReturned, "blocks returned");
                }
                var wrong = new float[22];
                Check.Fails(Status.Invalid, "100",
                            () => pool.SetScores(sequence, 0, 90, 11, wrong));
                Check.Fails(Status.Invalid, "are needed",
                            () => pool.SetScores(sequence, 0, 0, ulong.MaxValue, wrong));
                Check.Fails(Status.Invalid, "are needed",
                            () => pool.SetScores(sequence, 0, 0, 1UL << 63, new float[0]));
                Check.Fails(Status.Invalid, "layer 1",
                            () => pool.SetScores(sequence, 1, 0, 11, wrong));
                Check.Fails(Status.Invalid, "KV head 2", () => pool.GetRetention(sequence, 0, 2));
                Check.Fails(Status.Invalid, "KV head 2",
                            () => pool.GetScores(sequence, 0, 2, Span<float>.Empty));
            }
        }

        /// <summary>What all tokens of a text together give each other, over the query heads of a
        /// KV head.</summary>
        private static double[] GivenAttention(int head, int tokens)
        {
            var sums = new double[tokens];
            int group = (int)(Engine.QueryHeads / Engine.KvHeads);
            float[] keys = Engine.Rows(0, 1, 0, (uint)tokens, 0);
            float[] queries = Engine.Rows(2, 1, 0, (uint)tokens, 0);
            for (int token = 0; token < tokens; ++token)
            {
                for (int member = 0; member < group; ++member)
                {
                    int query = (token * Heads * group + head * group + member) * Dim;
                    double[] weights = Enumerable.Range(0, token + 1).Select(position =>
                        Math.Exp(Enumerable.Range(0, Dim).Sum(d => (double)queries[query + d] *
                            keys[(position * Heads + head) * Dim + d]) / Math.Sqrt(Dim))).ToArray();
                    double total = weights.Sum();
                    for (int position = 0; position <= token; ++position)
                    {
                        sums[position] += weights[position] / total;
                    }
                }
            }
            return sums;
        }

        [Test]
        public static void ObservedAttentionIsWhatTheDefinitionGives()
        {
            using (Engine engine = Observing())
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence(
                    new Policy { Scorer = Scorer.H2o, Budget = 40, ObserveEvery = 1 });
                engine.Run(sequence, 1, 79);
                engine.Run(sequence, 1, 1);
                double[][] all = Enumerable.Range(0, Heads)
                    .Select(head => GivenAttention(head, 80)).ToArray();
                for (uint head = 0; head < Heads; ++head)
                {
                    Check.Close(all[head], ScoresOf(pool, sequence, head)
                        .Select(score => (double)score).ToArray(), 5e-5, $"head {head}");
                }
                CompressReport report = pool.Compress(sequence);
                double mean = 0;
                for (uint head = 0; head < Heads; ++head)
                {
                    uint[] kept = Largest(all[head], 40);
                    Check.SameElements(kept, PositionsOf(pool, sequence, head), "survivors");
                    double lost = 1 - kept.Sum(p => all[head][p]) / all[head].Sum();
                    RetentionInfo history = pool.GetRetention(sequence, 0, head);
                    Check.Close(new[] { lost, lost },
                                new[] { history.LostAttention, history.LostAttentionSum }, 1e-5,
                                "lost attention");
                    mean += lost / Heads;
                }
                Check.Close(new[] { mean }, new[] { report.LostAttention }, 1e-5, "its mean");
                // Two may observe, and no third.
                var policy = new Policy { Scorer = Scorer.SnapKv, Budget = 40 };
                pool.CreateSequence(policy);
                Check.Fails(Status.Limit, "max_observed_sequences",
                            () => pool.CreateSequence(policy));
            }
        }

        [Test]
        public static void HeadsWithLanesOfTheirOwnShareABudget()
        {
            var policy = new Policy
            {
                Scorer = Scorer.Host, Budget = 32, Allocator = Allocator.Adaptive,
                FloorShare = 0.25f
            };
            using (Engine engine = Observing(lanePerHead: true))
            {
                Pool pool = engine.Pool;
                Sequence sequence = pool.CreateSequence(policy);
                engine.Run(sequence, 1, 96);
                // All of head 1 is better than anything of head 0, which is sure of 8.
                pool.SetScores(sequence, 0, 0, 96,
                               Enumerable.Range(0, 192).Select(i => (float)i).ToArray());
                CompressReport report = pool.Compress(sequence);
                Check.Equal(64UL, report.TokensAfter, "tokens after");
                Check.Equal(7UL, report.BlocksReturned, "blocks returned");
                int[] first = { 88, 40 };
                ulong[] returned = { 5, 2 };
                using (Step step = pool.BeginStep())
                {
                    step.Append(sequence, 1);
                    step.Reserve();
                    for (uint head = 0; head < Heads; ++head)
                    {
                        Check.SameElements(Span(first[head], 96),
                                           PositionsOf(pool, sequence, head), "survivors");
                        RetentionInfo history = pool.GetRetention(sequence, 0, head);
                        Check.Equal(1UL, history.Rounds, "rounds");
                        Check.Equal((ulong)first[head], history.TokensRemoved, "removed");
                        Check.Equal(returned[head], history.BlocksReturned, "blocks");
                        CheckTables(step, head, first[head]);
                    }
                    Check.Fails(Status.Invalid, "kv_head", () => step.Export(0, default, 2));
                }
            }
            using (Engine engine = Observing())
            {
                Check.Fails(Status.Unsupported, "LANE_PER_HEAD",
                            () => engine.Pool.CreateSequence(policy));
            }
        }

        private static void CheckTables(Step step, uint head, int first)
        {
            var kvLen = new int[1];
            var slotPositions = new int[97 - first];
            var buffers = new TableBuffers { KvLen = kvLen, SlotPositions = slotPositions };
            ExportedTables tables = step.Export(0, buffers, head);
            Check.Equal(head, tables.KvHead, "head of the tables");
            Check.Equal(16L * 2 * Dim * 4, tables.BlockBytes, "bytes of a block");
            Check.Equal(97 - first, kvLen[0], "slots");
            Check.SameElements(Enumerable.Range(first, 97 - first), slotPositions, "positions");
            Check.True(!step.TryExport(0, new TableBuffers { SlotPositions = new int[1] },
                                       out tables, head), "a buffer is too small");
            Check.Equal((ulong)(97 - first), tables.SlotPositionsCount, "what is needed");
        }

        [Test]
        public static void WhatAPolicyTakesIsKnownBeforehand()
        {
            using (var engine = new Engine())
            {
                Pool pool = engine.Pool;
                var policy = new Policy { Scorer = Scorer.Streaming, Budget = 32, Every = 16 };
                PolicyFootprint taken = pool.GetPolicyFootprint(policy);
                // 15 tokens may come before a step, and one in it: three blocks in each layer.
                Check.Equal(32UL, taken.TokensAfterRound, "after a round");
                Check.Equal(48UL, taken.TokensSteady, "before the next");
                Check.Equal(6UL, taken.BlocksSteady, "blocks");
                Check.Equal(6UL * 16 * 2 * 2 * 32 * 2, taken.BytesSteady, "bytes");
                policy.SkipLayers = 1; // which holds all of 100 tokens then
                taken = pool.GetPolicyFootprint(policy, 3, 100);
                Check.Equal(3UL, taken.StepTokens, "tokens of a step, as asked");
                Check.Equal(100UL, taken.Tokens, "length, as asked");
                Check.Equal(50UL, taken.TokensSteady, "with chunks");
                Check.Equal(7UL + 4, taken.BlocksSteady, "with a whole layer");
                policy.Every = 0;
                Check.Fails(Status.Invalid, "every", () => pool.GetPolicyFootprint(policy));
                Check.Throws<ArgumentNullException>(() => pool.GetPolicyFootprint(null), "null");
            }
        }

        [Test]
        public static void RoundsThatRemoveNothingSayWhy()
        {
            using (Engine engine = Observing())
            {
                Sequence sequence = engine.Pool.CreateSequence(
                    new Policy { Scorer = Scorer.Host, Budget = 8, Every = 16 });
                StepReport report = engine.Run(sequence, 1, 20);
                Check.Equal(0UL, report.Compactions, "rounds");
                Check.Equal(1UL, report.CompactionsSkipped, "skipped");
                Check.Equal(0UL, report.PressureRounds, "under pressure");
                Check.Equal(CompressOutcome.NoObservations, report.LastSkipOutcome, "why");
                Check.Equal(Status.Ok, report.LastSkipStatus, "its status");
                Check.Equal(1UL, engine.Pool.GetInfo(sequence).RoundsSkipped, "rounds skipped");
                Check.Equal(null, engine.Run(engine.Pool.CreateSequence(), 2, 1).LastSkipOutcome,
                            "of another step");
            }
        }

        [Test]
        public static void PoliciesRunWhenMemoryRunsShort()
        {
            // 2 MiB of which a half may be pinned: 128 blocks of 8 KiB.
            using (var engine = new Engine(config =>
            {
                config.ArenaBytes = 2 << 20;
                config.PressurePercent = 50;
            }, layer => layer.KeyFormat = StorageFormat.Float32, 1))
            {
                var policy = new Policy { Scorer = Scorer.Streaming, Budget = 64 };
                ulong rounds = 0;
                for (uint text = 0; text < 5; ++text)
                {
                    StepReport report = engine.Run(engine.Pool.CreateSequence(policy), text, 480);
                    Check.Equal(0UL, report.Compactions, "no round is due by itself");
                    rounds += report.PressureRounds;
                    Check.True(engine.Pool.GetStats().LiveBytes <= 1 << 20, "below the watermark");
                }
                Check.Equal(1UL, rounds, "of 150 blocks a round returns 26");
            }
        }
    }
}

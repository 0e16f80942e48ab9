// The batching example: made traces and the recorded one replay as they say, damaged and hostile
// ones are refused with a sentence, differences are noticed.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using Batching;

namespace Kvrt.Tests
{
    internal static class BatchingTests
    {
        private const string Header =
            "request prompt  rows dropped  seen retained rounds blocks checksum         outputs\n";

        /// <summary>Runs the program on a file with these bytes.</summary>
        private static int Run(byte[] trace, out string output, out string errors,
                               params string[] options)
        {
            string path = Path.Combine(Path.GetTempPath(), "kvrt-" + Guid.NewGuid());
            File.WriteAllBytes(path, trace);
            try
            {
                return Run(out output, out errors, new[] { path }.Concat(options).ToArray());
            }
            finally
            {
                File.Delete(path);
            }
        }

        private static int Run(out string output, out string errors, params string[] arguments)
        {
            var written = new StringWriter();
            var complaints = new StringWriter();
            int status = Program.Run(arguments, written, complaints);
            output = written.ToString();
            errors = complaints.ToString();
            return status;
        }

        /// <summary>The columns but the checksum, which depends on the kernels' last
        /// bits.</summary>
        private static string[] Columns(string output)
        {
            string[] lines = output.Split('\n');
            Check.Equal(Header, lines[0] + "\n", "header");
            return lines.Skip(1).TakeWhile(line => line.StartsWith(" ")).Select(line =>
            {
                string[] words = line.Split(' ').Where(word => word.Length != 0).ToArray();
                Check.Equal(16, words[8].Length, "digits of the checksum");
                return string.Join(" ", words.Where((word, i) => i != 8));
            }).ToArray();
        }

        private static string[] Verdicts(string output)
        {
            return Columns(output).Select(line => line.Split(' ').Last()).ToArray();
        }

        [Test]
        public static void AMadeTraceReplays()
        {
            byte[] trace = TraceMaker.Make(TraceMaker.Small, false);
            int status = Run(trace, out string output, out string errors);
            Check.Equal(0, status, errors);
            Check.SameElements(new[]
            {
                "0 9 17 5 12 24 0 2 equal", "1 16 22 0 22 44 0 4 equal", "2 2 6 2 4 8 0 2 equal"
            }, Columns(output), "requests");
            // Four steps; at the most 16 + 9 + 2 tokens, and 5 + 4 + 2 behind them in 4 blocks
            // more.
            Check.Contains("\nsteps 4, tokens 38, rounds 0, blocks at most 8, returned 8, bytes " +
                           "returned " + 8 * 16 * 2 * 2 * 32 * 4 + "\n", output, "totals");
        }

        [Test]
        public static void EverySizeOfABatchGivesTheSame()
        {
            byte[] trace = TraceMaker.Make(TraceMaker.Small, true);
            var outputs = new HashSet<string>();
            foreach (string slots in new[] { "1", "2", "3", "4096" })
            {
                Check.Equal(0, Run(trace, out string output, out string errors, "--slots", slots),
                            errors);
                outputs.Add(output.Substring(0, output.IndexOf("steps", StringComparison.Ordinal)));
            }
            Check.Equal(1, outputs.Count, "different tables, checksums among them");
            Check.SameElements(new[]
            {
                "0 9 17 5 12 20 1 2 equal", "1 16 22 0 22 22 2 2 equal", "2 2 6 2 4 8 0 2 equal"
            }, Columns(outputs.First()), "requests");
        }

        /// <summary>In 2 MiB there are 256 blocks of 16 tokens, 2 heads and 2 * 32 floats; each
        /// request takes 188. They run one after the other there, and all at once in 8 MiB.
        /// </summary>
        [Test]
        public static void WithoutRoomTheYoungestWait()
        {
            uint[][] request = { new[] { 1500u, 1500u }, new[] { 1u, 1u } };
            byte[] trace = TraceMaker.Make(new[] { request, request, request }, false);
            foreach (string arena in new[] { "2", "8" })
            {
                int status = Run(trace, out string output, out string errors, "--arena-mib", arena);
                Check.Equal(0, status, errors);
                Check.SameElements(new[] { "equal", "equal", "equal" }, Verdicts(output), arena);
                Check.Contains(arena == "2" ? "\nsteps 6," : "\nsteps 2,", output, "steps");
            }
        }

        [Test]
        public static void WhatFitsNotEvenAloneIsAnError()
        {
            uint[][] request = { new[] { 3000u, 3000u } };
            byte[] trace = TraceMaker.Make(new[] { request }, false);
            Check.Equal(1, Run(trace, out _, out string errors, "--arena-mib", "2"), "exit status");
            Check.Contains("KV_TOO_LARGE", errors, "message");
        }

        [Test]
        public static void TheRecordedTraceReplays()
        {
            string path = Path.Combine(Runner.Repository, "samples", "batching", "smollm2.trace");
            foreach (string arena in new[] { "2", "8" })
            {
                int status = Run(out string output, out string errors, path, "--arena-mib", arena,
                                 "--slots", "4", "--threads", "2");
                Check.Equal(0, status, errors);
                Check.SameElements(new[] { "equal", "equal", "equal", "equal" }, Verdicts(output),
                                   "verdicts");
            }
        }

        [Test]
        public static void ADifferenceIsNoticed()
        {
            byte[] trace = TraceMaker.Make(TraceMaker.Small, false);
            trace[trace.Length - 9] ^= 1; // the exponent of the last output
            TraceMaker.Seal(trace);
            Check.Equal(1, Run(trace, out string output, out string errors), "exit status");
            Check.SameElements(new[] { "equal", "equal", "DIFFERENT" },
                               Verdicts(output), "verdicts");
            Check.Contains("differs from the recording", errors, "message");
        }

        /// <summary>The first request's fields lie behind a header of 8 + 15 * 4 + 4 + 8 + 16 + 8
        /// bytes; each of the four is made wrong in turn.</summary>
        [Test]
        public static void ADifferentStateIsNoticed()
        {
            const int Request = 104;
            foreach (int field in new[] { 2, 3, 4, 5 }) // rounds, seen, retained of both layers
            {
                byte[] trace = TraceMaker.Make(TraceMaker.Small, false);
                trace[Request + field * 4] += 1;
                TraceMaker.Seal(trace);
                Check.Equal(1, Run(trace, out string output, out _), $"exit status, field {field}");
                Check.SameElements(new[] { "DIFFERENT", "equal", "equal" },
                                   Verdicts(output), "verdicts");
            }
        }

        /// <summary>Offsets of counts in a made trace, values beyond their bounds, and the words of
        /// the message.</summary>
        [Test]
        public static void HostileCountsAreRefused()
        {
            var cases = new (int Offset, uint Value, string Message)[]
            {
                (8, 0, "layers is 0"), (8, 65, "layers is 65"),
                (12, 0, "query_heads is 0"), (12, 1025, "query_heads is 1025"),
                (16, 5, "kv_heads is 5"), (16, 3, "multiple of kv_heads"),
                (20, 31, "head_dim is 31"), (20, 260, "head_dim is 260"),
                (20, 36, "multiple of 8"), (28, 0, "exactly when nothing is rotated"),
                (32, 3, "must be even"), (32, 64, "rope_dimensions is 64"),
                (32, 0, "exactly when nothing is rotated"),
                (68, 0, "requests is 0"), (68, 4097, "requests is 4097"),
                (68, 4096, "the file ends within"),
                (108, 0, "turns is 0"), (108, 65537, "turns is 65537"),
                (128, 0, "rows is 0"), (128, 8193, "rows is 8193"),
                (128, 8192, "the file ends within"), (132, 10, "accepted is 10"),
                (136, 10, "output_rows is 10"), (68, 2, "bytes lie behind the last request"),
                (12, 1024, "the file ends within"), (24, 77, "KV_UNSUPPORTED"),
                (36, 99, "KV_")
            };
            foreach (var hostile in cases)
            {
                byte[] trace = TraceMaker.Make(TraceMaker.Small, false);
                BitConverter.GetBytes(hostile.Value).CopyTo(trace, hostile.Offset);
                TraceMaker.Seal(trace);
                Check.Equal(1, Run(trace, out _, out string errors), hostile.Message);
                Check.Contains(hostile.Message, errors, "message");
            }
        }

        [Test]
        public static void ATraceCutAnywhereIsRefused()
        {
            byte[] whole = TraceMaker.Make(TraceMaker.Small, false);
            for (int length = 0; length < whole.Length; length += 1 + length / 7)
            {
                byte[] cut = whole.Take(length).ToArray();
                Check.Throws<TraceException>(() => TraceReader.Decode(cut), $"{length} bytes");
                if (length >= 8)
                {
                    TraceMaker.Seal(cut);
                    Check.Throws<TraceException>(() => TraceReader.Decode(cut),
                                                 $"{length} bytes, sealed");
                }
            }
        }

        [Test]
        public static void ADamagedTraceIsRefused()
        {
            byte[] trace = TraceMaker.Make(TraceMaker.Small, false);
            trace[trace.Length / 2] ^= 4;
            Check.Equal(1, Run(trace, out _, out string errors), "exit status");
            Check.Contains("checksum does not match", errors, "message");
            trace = TraceMaker.Make(TraceMaker.Small, false);
            trace[0] ^= 1;
            Check.Equal(1, Run(trace, out _, out errors), "exit status");
            Check.Contains("this is not a trace", errors, "message");
        }

        [Test]
        public static void WhatDoesNotFitIsSaid()
        {
            int status = Run(out _, out string errors, "/nowhere/trace");
            Check.Equal(1, status, "exit status");
            Check.Contains("cannot read '/nowhere/trace'", errors, "message");
        }

        [Test]
        public static void WrongArgumentsAreSaid()
        {
            string[][] wrong =
            {
                new string[0], new[] { "a", "b" }, new[] { "" }, new[] { "a", "--slot", "1" },
                new[] { "a", "--slots" }, new[] { "a", "--slots", "0" },
                new[] { "a", "--slots", "4097" }, new[] { "a", "--slots", "-1" },
                new[] { "a", "--slots", "1x" }, new[] { "a", "--arena-mib", "1" },
                new[] { "a", "--threads", "257" }, new[] { "--threads", "1" }
            };
            foreach (string[] arguments in wrong)
            {
                int status = Run(out string output, out string errors, arguments);
                Check.Equal(2, status, "exit status of: " + string.Join(" ", arguments));
                Check.Contains("usage: batching TRACE", errors, "message");
                Check.Equal("", output, "output");
            }
        }
    }
}

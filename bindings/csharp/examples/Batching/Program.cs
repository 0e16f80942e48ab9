// The program: reads a trace and the limits, replays, prints what came out.
//
// Exit status: 0 all as recorded, 1 something differs or failed, 2 the arguments were wrong.
using System;
using System.Globalization;
using System.IO;
using Kvrt;

namespace Batching
{
    public static class Program
    {
        private const string Usage =
            "usage: batching TRACE [--slots N] [--arena-mib N] [--threads N]\n" +
            "\n" +
            "Replays a trace (docs/trace.md) in batches and compares what comes out.\n" +
            "\n" +
            "  --slots N      sequences that run at once, 1 to 4096 (3)\n" +
            "  --arena-mib N  memory for keys and values in MiB, 2 to 131072 (8)\n" +
            "  --threads N    threads of the library, 1 to 256 (1)\n";

        /// <summary>The command line was wrong; the message says how.</summary>
        private sealed class WrongArgumentsException : Exception
        {
            public WrongArgumentsException(string message) : base(message) { }
        }

        public static int Main(string[] arguments)
        {
            return Run(arguments, Console.Out, Console.Error);
        }

        public static int Run(string[] arguments, TextWriter output, TextWriter errors)
        {
            try
            {
                var limits = new Limits();
                string path = Parse(arguments, limits);
                bool equal = ReplayFile(path, limits, output);
                CheckNothingIsAlive();
                if (!equal)
                {
                    errors.Write("batching: what came out differs from the recording\n");
                }
                return equal ? 0 : 1;
            }
            catch (WrongArgumentsException error)
            {
                errors.Write($"batching: {error.Message}\n\n{Usage}");
                return 2;
            }
            catch (KvrtException error)
            {
                errors.Write($"batching: {Library.NameOf(error.Status)}: {error.Message}\n");
                return 1;
            }
            catch (Exception error)
            {
                errors.Write($"batching: {error.Message}\n");
                return 1;
            }
        }

        private static bool ReplayFile(string path, Limits limits, TextWriter output)
        {
            Trace trace = TraceReader.ReadFile(path);
            var results = new Results(trace);
            using (var replay = new Replay(trace, limits, results))
            {
                replay.Run();
            }
            results.Print(output);
            output.Flush();
            return results.AllEqual;
        }

        private static void CheckNothingIsAlive()
        {
            foreach (LiveKind kind in Enum.GetValues(typeof(LiveKind)))
            {
                if (Library.LiveCount(kind) != 0)
                {
                    throw new InvalidOperationException(
                        $"{Library.LiveCount(kind)} {kind} of the library are still alive");
                }
            }
        }

        /// <summary>Fills the limits, and returns the path of the trace.</summary>
        private static string Parse(string[] words, Limits limits)
        {
            string path = null;
            for (int i = 0; i < words.Length; ++i)
            {
                switch (words[i])
                {
                    case "--slots":
                        limits.Slots = Number(words, ++i, 1, 4096);
                        break;
                    case "--arena-mib":
                        limits.ArenaMiB = Number(words, ++i, 2, 131072);
                        break;
                    case "--threads":
                        limits.Threads = Number(words, ++i, 1, 256);
                        break;
                    default:
                        path = Path(words[i], path);
                        break;
                }
            }
            return path ?? throw new WrongArgumentsException("give the path of a trace");
        }

        private static string Path(string word, string before)
        {
            if (word.StartsWith("-", StringComparison.Ordinal))
            {
                throw new WrongArgumentsException($"'{word}' is not an option");
            }
            if (word.Length == 0 || before != null)
            {
                throw new WrongArgumentsException("give the path of one trace");
            }
            return word;
        }

        private static uint Number(string[] words, int index, uint least, uint most)
        {
            string option = words[index - 1];
            if (index == words.Length)
            {
                throw new WrongArgumentsException($"{option} needs a value behind it");
            }
            if (!uint.TryParse(words[index], NumberStyles.None, CultureInfo.InvariantCulture,
                               out uint value) || value < least || value > most)
            {
                throw new WrongArgumentsException($"{option} is '{words[index]}', it must be a " +
                                                  $"number from {least} to {most}");
            }
            return value;
        }
    }
}

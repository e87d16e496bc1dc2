// Checkpoints: weights, optimiser and progress in one safetensors file, replaced atomically.
#ifndef LANGUAGE_MODEL_CHECKPOINT_H
#define LANGUAGE_MODEL_CHECKPOINT_H

#include <map>
#include <string>

#include "trainer.h"

namespace language_model {

// `identity` goes into the file's metadata: sizes, options and text that a run must share to go on.
void save_checkpoint(const std::string& path, const Model&, const TrainingState&,
                     const std::map<std::string, std::string>& identity);

// Fills the model's weights and the state. Throws UserError for a missing, unreadable or damaged file and
// for one with another identity; then nothing was changed.
void load_checkpoint(const std::string& path, const std::map<std::string, std::string>& identity, Model&,
                     TrainingState&);

}  // namespace language_model
#endif
